"""The implementation of :mod:`loadstone.accelerate`; no public names.

* ``checkpoint``: finds the files of a call, and the calls that are left to the library.
* ``planning``: the library's arguments as a plan.
* ``dispatch``: hooks on a model whose tensors have values.
* ``offload``: offload folders for the library's hooks.
"""

from loadstone._adapters.sites import sites_of

sites_of("accelerate").require()
