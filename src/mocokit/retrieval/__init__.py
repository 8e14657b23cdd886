"""Finding pictures by pictures: vectors of whole data sets, an index over them, scores, a local page."""
