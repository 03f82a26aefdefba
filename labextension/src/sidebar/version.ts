/** The version of this package and of the Python one; a test holds them together. */
export const VERSION = '0.1.0';
