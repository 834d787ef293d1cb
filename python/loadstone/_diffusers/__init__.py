"""What stands behind :mod:`loadstone.diffusers`; no public names.

* ``checkpoint``: a file as diffusers' converters see it: names and tensors without data.
* ``load``: the middle of ``from_single_file`` and ``from_pretrained``, done by loadstone.
* ``hooks``: where that stands in the library.
"""

from loadstone._sites import sites_of

sites_of("diffusers").require()
