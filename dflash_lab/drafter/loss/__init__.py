"""The draft loss: full vocabulary, both sides from hidden states, chunk by chunk, gradient computed in the
forward.
"""
