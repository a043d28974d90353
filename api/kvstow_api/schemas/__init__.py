"""The JSON of the API: strict request bodies, and views that answers are made of.

Fields are only ever added within /v1.
"""
