"""Thin ipywidgets views over the figure functions."""
