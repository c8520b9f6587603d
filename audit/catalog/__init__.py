"""Catalogue of methods: defenses and attacks by name, with settings read from their signatures."""
