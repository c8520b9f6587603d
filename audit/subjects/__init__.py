"""Subjects, the objects under attack, with their private data: a trained model, or shared updates."""
