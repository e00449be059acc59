// What is packed into the page: data, compressed, in blocks that nothing evaluates.

/**
 * The data of a block.
 * @param {string} id
 * @returns {Promise<ArrayBuffer>}
 */
export async function unpacked(id) {
  const letters = atob(document.getElementById(id)?.textContent ?? "");
  const bytes = new Uint8Array(letters.length);
  for (let place = 0; place < bytes.length; place++) bytes[place] = letters.charCodeAt(place);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}
