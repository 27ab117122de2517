"""Commands that probe and verify: their options, what they show meanwhile, what they end with."""
