"""The implementation of :mod:`loadstone.diffusers`; no public names.

* ``checkpoint``: a file as diffusers' converters see it: names and tensors without data.
* ``load``: planning and reading in ``from_single_file`` and ``from_pretrained``.
* ``hooks``, ``pipelines``, ``quantizers``: the replaced functions of the library.
* ``missing_keys``, ``expected``: names that a file lacks. ``mismatch``: configs that do not fit.
"""

from loadstone._adapters.sites import sites_of

sites_of("diffusers").require()
