"""One sequence over several ranks: messages, rings, head exchange, agreement and peer errors."""
