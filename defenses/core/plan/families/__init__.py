"""Families of methods: code shared by several defenses of one kind, beyond the step plan."""
