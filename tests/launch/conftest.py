"""What the tests of `launch` share."""

from no_preload import no_preload as no_preload
