"""The stores in the types of other libraries, one module for each library."""
