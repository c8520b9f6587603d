"""Families of methods: what several defenses of one kind share beyond the step plan."""
