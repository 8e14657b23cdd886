"""Momentum contrast itself: encoders, EMA, the key queue, the losses and one whole training step per method.

Nothing here knows of files, data sets or runs; it imports nothing but torch and the two backbone libraries, so it
can be lifted into a notebook as it stands.
"""
