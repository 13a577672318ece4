"""What rcfarm keeps in it: key layout, records, manifests, selectors, audit."""

from store.schema.keys import Keys
from store.schema.labels import Labeled, Labeler, LabelMatcher, PodLocation, UnknownObject
from store.schema.records import NodeSpec, RCSpec, decode, encode
from store.schema.selectors import BadSelector, Selector

__all__ = [
    "BadSelector",
    "Keys",
    "LabelMatcher",
    "Labeled",
    "Labeler",
    "NodeSpec",
    "PodLocation",
    "RCSpec",
    "Selector",
    "UnknownObject",
    "decode",
    "encode",
]
