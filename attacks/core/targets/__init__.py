"""Targets of attacks: what an attacker is given, its narrowing to a threat model, and checked results."""
