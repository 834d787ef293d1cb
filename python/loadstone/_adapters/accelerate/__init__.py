"""The implementation of :mod:`loadstone.accelerate`; no public names.

* ``loading``: loads into a model.
* ``checkpoint``: the files of a call, and the loads that accelerate must do itself.
* ``planning``: translation of accelerate's arguments into a plan.
* ``dispatch``: hooks on a model whose tensors have values.
* ``offload``: offload folders for accelerate's hooks.
* ``functions``: the modules that contain a function of accelerate.
* ``sharded``: ``Accelerator.prepare`` of models on meta.
"""

from loadstone._adapters.sites import sites_of

sites_of("accelerate").require()
