// Where nodes stand on the map: few in a ring, many in a bunch. A seat depends on its number and on how many there are.

const MOST_ROUND = 14;
const LEAST_RADIUS = 16; // of a grape with a name below it
const NAME = 56; // room for a name beside a ring, and under a grape
const UNDER = 38;

/** Radius of a grape, the middle of each of `n` seats in pixels, and whether they stand in a ring (with their names). */
export function seats(n, width, height) {
  const circle = n <= MOST_ROUND ? ring(n, width, height) : null;
  if (circle) return circle;
  const radius = Math.max(4, Math.min(24, 0.4 * Math.sqrt(((Math.PI / 4) * width * height) / n)));
  const points = packed(n, width / 2 - radius - 10, height / 2 - radius - 16);
  return { radius, points: points.map(([x, y]) => [width / 2 + x, height / 2 + y]), round: false };
}

/** The largest grapes whose names still have room; null where there is none for a ring. */
function ring(n, width, height) {
  let radius = Math.min(62, 0.2 * Math.min(width, height));
  for (; radius >= LEAST_RADIUS; radius -= 2) {
    const points = circle(n, width, height, radius);
    const apart = points.every(([x, y], i) => points.slice(i + 1).every(([u, v]) =>
      Math.abs(x - u) > 2 * radius + NAME / 2 || Math.abs(y - v) > 2 * radius + UNDER));
    if (apart) return { radius, points, round: true };
  }
  return null;
}

function circle(n, width, height, radius) {
  if (n === 1) return [[width / 2, height / 2 - 6]];
  const a = width / 2 - radius - NAME, b = height / 2 - radius - UNDER;
  return Array.from({ length: n }, (_, index) => {
    const angle = (2 * Math.PI * index) / n - (n === 2 ? Math.PI : Math.PI / 2);
    const lower = n === 3 ? 0.2 * b : 0; // a triangle has its middle higher up
    return [width / 2 + Math.cos(angle) * Math.min(a, 1.9 * b), height / 2 - 6 + Math.sin(angle) * b + lower];
  });
}

/** The `n` points of a hexagonal lattice that lie closest to the middle of an ellipse with half axes a and b. */
function packed(n, a, b) {
  const gap = Math.sqrt((2 * Math.PI * a * b) / (Math.sqrt(3) * n)) * 0.97;
  const rows = Math.ceil((b * 1.5) / (gap * 0.866)), columns = Math.ceil((a * 1.5) / gap);
  const points = [];
  for (let row = -rows; row <= rows; row += 1) {
    for (let column = -columns; column <= columns; column += 1) {
      const x = (column + (row % 2 ? 0.5 : 0)) * gap, y = row * gap * 0.866;
      points.push([x, y, (x / a) ** 2 + (y / b) ** 2]);
    }
  }
  return points.sort((p, q) => p[2] - q[2]).slice(0, n);
}
