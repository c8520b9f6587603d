"""Lower bounds on epsilon from the outcomes of membership tests, their assumptions, and the verdict on a claim."""
