"""What is attacked: a trained model, a shared update."""
