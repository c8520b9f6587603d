"""Targets of attacks: the attacker's view of a training, its narrowing to a threat model, and checked results."""
