"""Small tools that every room uses; they import nothing but the errors."""
