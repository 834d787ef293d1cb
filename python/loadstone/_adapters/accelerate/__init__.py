"""The implementation of :mod:`loadstone.accelerate`; no public names.

* ``loading``: loads into a model.
* ``checkpoint``: finds the files of a call, and the calls that are left to the library.
* ``planning``: the library's arguments as a plan.
* ``dispatch``: hooks on a model whose tensors have values.
* ``offload``: offload folders for the library's hooks.
* ``functions``: the modules in which a function of the library is found.
* ``sharded``: ``Accelerator.prepare`` of models on meta.
"""

from loadstone._adapters.sites import sites_of

sites_of("accelerate").require()
