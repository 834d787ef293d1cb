"""The implementation of :mod:`loadstone.llama_cpp`; no public names.

* ``converter``: llama.cpp's converter, found in a folder and imported for the length of a trace.
* ``files``: the model's tensors as the converter finds them: names, dtypes and shapes.
* ``weights``, ``arrays``: tensors and arrays without data, which it works on.
* ``tracing``: one run of it, and the recipes that come of it.
* ``metadata``: the keys and values that it would write.
"""
