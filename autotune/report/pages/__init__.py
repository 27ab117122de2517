"""Web pages: a profile, two side by side, and what stands beside a plan; their charts and templates."""
