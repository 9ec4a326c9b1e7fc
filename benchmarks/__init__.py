"""How long attention statistics take and how much memory, ours and other tools', against a plain forward pass."""
