"""What reads a target that is decoded. So far: state_cache.py, what recurrent layers keep of a text; rounds.py, how
they read a round; recurrences.py, of which of them each step is known. Keys, values and kernels are still in nn/.
"""
