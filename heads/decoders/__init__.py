"""What reads a target that is decoded. So far: state_cache.py, what recurrent layers keep of a text, and
recurrences.py, how they read a round; keys, values and kernels are still in nn/.
"""
