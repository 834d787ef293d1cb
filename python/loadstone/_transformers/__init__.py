"""What stands behind :mod:`loadstone.transformers`; no public names.

* ``rules``: which key of a checkpoint goes to which target, and what is done to it, as the library
  says.
* ``absent``: the keys that an incomplete group of experts lacks.
* ``kernels``: the library's arithmetic operations, matched by class to kernels of the core.
* ``cache``: recipes kept in the user's cache folder.
* ``load``: the middle of ``from_pretrained``, done by loadstone; ``v4``: of releases before 5.0.
* ``gaps``: what both do beside reading.
* ``releases``: what is called in another way in each.
* ``hooks``: where that stands in the library.
* ``adapters``, ``trainer``: other places in which the library reads files.
"""

from loadstone._sites.transformers import SITES

SITES.require()

# Releases before 5.0 convert no values, and have other places.
IS_V5 = SITES.is_since("5.0")
