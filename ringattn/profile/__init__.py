"""Hardware profiles: schema, strict YAML, locations, resolution by tiers."""
