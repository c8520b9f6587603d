"""Federated training: clients take local steps under a defense, and a server averages their messages."""
