"""The implementation of :mod:`loadstone.transformers`; no public names.

* ``rules``: recipes, derived from the library's own conversion code.
* ``missing_experts``: the keys that an incomplete group of experts lacks.
* ``kernels``: the library's arithmetic operations, matched by class to kernels of the core.
* ``stripped_config``: the choice of the library's quantizer or loadstone's codecs.
* ``quantized``: the keys of a quantized checkpoint that loadstone dequantizes.
* ``cache``: recipes in the user's cache folder.
* ``hooks``: hooks on functions that all releases have.
* ``v5``, ``load``: hooks, planning and reading from 5.0 on; ``v4``: the same for 4.57.
* ``from_pretrained_call``: missing tensors and the proof, for all releases.
* ``releases``: functions that differ between releases from 5.0 on.
* ``adapters``, ``trainer``: other functions of the library that read files.
"""

from loadstone._adapters.sites.transformers import SITES

SITES.require()
