"""What is drafted for: targets, their templates, caches and answers."""
