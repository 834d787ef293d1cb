"""The implementation of :mod:`loadstone.llama_cpp`; no public names.

* ``converter``: find llama.cpp's converter in a folder, and import it for one trace.
* ``files``: names, dtypes and shapes of the model's tensors, for the converter.
* ``weights``, ``arrays``: tensors and arrays without data.
* ``tracing``: one run of the converter, and its recipes.
* ``metadata``: the keys and values that the converter would write.
* ``rules``: conversions without the converter, by the rules in ``rules.json``.
* ``vocabulary``: the tokenizer's keys for these conversions.
"""
