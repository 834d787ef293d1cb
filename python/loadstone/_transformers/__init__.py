"""What stands behind :mod:`loadstone.transformers`; no public names.

* ``rules``: which key of a checkpoint goes to which target, and what is done to it, as the library
  says.
* ``absent``: the keys that an incomplete group of experts lacks.
* ``kernels``: the library's arithmetic operations, matched by class to kernels of the core.
* ``cache``: recipes kept in the user's cache folder.
* ``load``: the middle of ``from_pretrained``, done by loadstone.
* ``hooks``: where that stands in the library.
* ``adapters``, ``trainer``: other places in which the library reads files.
"""

from loadstone._sites import sites_of

sites_of("transformers").require()
