"""The implementation of :mod:`loadstone.diffusers`; no public names.

* ``checkpoint``: a file as a dictionary of tensors without data, for diffusers' converters.
* ``load``: planning and reading in ``from_single_file`` and ``from_pretrained``.
* ``hooks``, ``pipelines``, ``quantizers``: replacements of functions in diffusers.
* ``missing_keys``, ``expected_keys``: names that a file lacks.
* ``config_mismatch``, ``diagnosis``: configs that do not fit the file.
"""

from loadstone._adapters.sites import sites_of

sites_of("diffusers").require()
