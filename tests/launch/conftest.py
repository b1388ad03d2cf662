"""What the tests of `launch` share."""

from no_preload import no_preload as no_preload
from served_thing import directory as directory
from served_thing import keys as keys
from served_thing import served as served
