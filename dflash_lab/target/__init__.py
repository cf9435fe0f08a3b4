"""What is drafted for: a model, its taps, its head, its template."""
