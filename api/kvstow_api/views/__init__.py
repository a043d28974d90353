"""What the API answers: frozen dataclasses that the routes fill and the client reads back.

Standard library only, so that a client starts without pydantic.
"""
