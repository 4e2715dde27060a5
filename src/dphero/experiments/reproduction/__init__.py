"""The DP-Hero paper's table and figures, run anew: the sound mechanism, and the published recipe with its true price.

``settings`` says what is varied and how large a reproduction is; the modules of ``figures`` plan their runs and present
them; ``items`` lists them; ``running`` does one from end to end.
"""
