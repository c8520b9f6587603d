"""Subjects of attacks with their private data: a trained model, or shared updates."""
