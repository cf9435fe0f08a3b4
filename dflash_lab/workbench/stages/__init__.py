"""The six stages: parameters and runner of each."""
