"""Where the files of a store lie: a folder that hosts mount, or a server behind a URL."""
