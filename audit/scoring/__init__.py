"""From results and the truth to metrics with intervals."""
