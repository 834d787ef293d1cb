"""The implementation of :mod:`loadstone.diffusers`; no public names.

A load passes through these modules from the last to the first:

* ``checkpoint``, ``packed``: a file as a dictionary of tensors without data.
* ``conversion``: runs of diffusers' single-file converters on this dictionary.
* ``expected_keys``, ``missing_targets``: names that a file lacks.
* ``config_mismatch``, ``config_search``, ``local_configs``: configs that do not fit the file.
* ``recipes``: recipes and findings for a plan.
* ``load``: plan, read, dispatch of one model.
* ``arguments``, ``failures``: checks of direct calls, and the causes of failed calls.
* ``hooks``, ``quantizers``, ``pipelines``: replacements of functions in diffusers.
"""

from loadstone._adapters.sites import sites_of

sites_of("diffusers").require()
