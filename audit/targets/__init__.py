"""Targets: from a step that was executed to what an attacker is given of it."""
