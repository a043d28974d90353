"""What is published: a release of the package, and the documents as a site."""
