"""What the tests of engines share."""

from no_preload import no_preload as no_preload
