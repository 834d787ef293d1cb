"""What stands behind :mod:`loadstone.accelerate`; no public names.

* ``checkpoint``: which files are meant, and which calls are left to the library.
* ``planning``: the library's arguments as a plan.
* ``offload``: tensors that lie in a folder, so that the library's hooks find them.
"""

from loadstone._sites import sites_of

sites_of("accelerate").require()
