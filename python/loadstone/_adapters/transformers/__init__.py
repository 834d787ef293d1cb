"""The implementation of :mod:`loadstone.transformers`; no public names.

* ``rules``: recipes, derived from the library's own conversion code.
* ``absent``: the keys that an incomplete group of experts lacks.
* ``kernels``: the library's arithmetic operations, matched by class to kernels of the core.
* ``stripped_config``: whether the library or loadstone takes care of a quantized checkpoint.
* ``quantized``: the keys of a quantized checkpoint, which is dequantized.
* ``cache``: recipes kept in the user's cache folder.
* ``hooks``: the replaced functions of the library that all releases have.
* ``v5``, ``load``: those from 5.0 on, and their planning and reading; ``v4``: both for 4.57.
* ``from_pretrained_call``: missing tensors and the proof, for both.
* ``releases``: functions that differ between releases from 5.0 on.
* ``adapters``, ``trainer``: other functions of the library that read files.
"""

from loadstone._adapters.sites.transformers import SITES

SITES.require()
