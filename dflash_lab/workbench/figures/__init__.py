"""Plotly figures of each stage: data in, figure out."""
