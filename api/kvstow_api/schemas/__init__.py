"""What the API is sent: strict bodies and queries.

Fields are only ever added within /v1.
"""
