"""The implementation of :mod:`loadstone.transformers`; no public names.

A call of ``from_pretrained`` passes through these modules:

* ``hooks``: the entry point, and hooks on functions that all releases have.
* ``from_pretrained_session``: one call, its missing tensors and its proof, for all releases.
* ``v5``: hooks of releases from 5.0 on; ``releases``: functions that differ between these.
* ``stripped_config``: the choice of the library's quantizer or loadstone's codecs.
* ``load``: ``TransformersV5Session``, which plans, reads and installs.
* ``cache``, ``code_key``: recipes in the user's cache folder, and their key.
* ``conversion``: the input and result of ``derivation``, which traces recipes from the library's
  own conversion code. It uses ``registry`` (the conversions of one model), ``quantized`` (the keys
  of a quantized checkpoint), ``kernels`` (the library's arithmetic, as kernels of the core) and
  ``missing_experts`` (the keys that an incomplete group of experts lacks).
* ``v4``: hooks, planning and reading of 4.57, which converts nothing.

Other entry points:

* ``trainer``: the library's ``Trainer``.
* ``gguf``: the names of a GGUF file's tensors in published checkpoints.
* ``rule_export``: rules for a model type, from its traced recipes.
"""

from loadstone._adapters.sites.transformers import SITES

SITES.require()
